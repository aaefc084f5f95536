"""Mixins of TE module classes, their placement plan, and their initialization."""
