"""How long answers pause while the server loads, exports, imports, shows its tree, or cannot write."""
