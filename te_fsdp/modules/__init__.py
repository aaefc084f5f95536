"""TransformerEngine's modules on device meshes."""
