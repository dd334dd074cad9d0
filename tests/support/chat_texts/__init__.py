"""Texts of chats as published models have them."""
