"""Thin seams to other frameworks: each module is imported by whoever uses its framework, and imports that.

    fabric         Lightning Fabric: a strategy
    accelerate     Hugging Face accelerate: an Accelerator
    transformers   Hugging Face transformers: a Trainer
    peft           Hugging Face PEFT: LoRA on TransformerEngine's layers
    training_log   numbers of each step for JSON lines, TensorBoard, Weights & Biases
    torchtitan     torchtitan: base class of models, parallelize function, checkpoint manager

What works and what does not is a table for each in docs/integrations.md.
"""
