"""What holds for the suite and its documents: order, choice, formats, examples."""
