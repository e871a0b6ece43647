"""PyInstaller's hook: the kernels, the sources of those for GPUs, and modules that are imported by name."""

from PyInstaller.utils.hooks import collect_data_files, collect_dynamic_libs, collect_submodules

binaries = collect_dynamic_libs("lowprec", search_patterns=["_kernels.[sd]*"])
datas = collect_data_files("lowprec", includes=["**/*.cu*", "**/_kernels.txt"])
hiddenimports = collect_submodules("lowprec", on_error="ignore")
