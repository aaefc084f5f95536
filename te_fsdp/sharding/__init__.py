"""``fully_shard``, ``materialize`` and ``report``: a model's way onto its meshes, in the right order."""
