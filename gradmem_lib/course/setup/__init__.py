"""What ``gradmem doctor`` and ``gradmem lab`` run."""
