"""Earlier public paths of modules that have moved."""
