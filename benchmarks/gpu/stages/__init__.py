"""What the programs of the GPU day run, stage by stage."""
