"""The commands of ``gradmem``, one a file: ``add`` says which options a command has, and the
function beside it does the work and returns the exit code.

What a command needs of the library, it imports when it runs: the import of torch takes seconds, and
``--help`` and the check of the options do not need it.
"""
