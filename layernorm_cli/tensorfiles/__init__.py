"""Tensors in files: refs, readers by rows, atomic writers."""
