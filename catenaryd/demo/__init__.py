"""`catenaryd demo`: its screens, the plans that they show, and the models it shows them with."""
