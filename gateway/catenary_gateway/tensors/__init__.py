"""Conversion of tensors between arrays and the forms of every protocol."""
