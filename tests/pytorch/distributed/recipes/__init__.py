"""Ports of models and training scripts with the structure of TransformerEngine's public recipes."""
