"""Every private or internal name of torch and transformers that the library touches, each under a
public name of ours. A file here has one subject.

All of them were seen in torch 2.13.0 and transformers 5.24.0. They are also in 2.11.0 and 5.17.0,
except where a comment says otherwise. When a new version moves a name, change the file that has it.
tests/repository/test_compat.py fails for a private name in a file outside this package.
transformers is imported only inside the functions that need it.
"""
