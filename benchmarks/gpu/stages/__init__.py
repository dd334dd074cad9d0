"""The stages of the programs of the GPU day."""
