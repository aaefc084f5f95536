"""Ports of training scripts with the structure of TransformerEngine's public recipes."""
