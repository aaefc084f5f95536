"""Pure data and arithmetic about where the pieces of a weight lie. No TE, no process group, no tensor."""
