"""Nested lists, tuples and dicts of tensors: their leaves, and a function of each leaf."""

from torch.utils import _pytree

tree_flatten = _pytree.tree_flatten
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only
