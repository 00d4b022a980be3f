"""What ``gradmem doctor``, ``gradmem lab`` and ``gradmem progress`` run."""
