"""The sections of `gpu_report.py`: each measures one thing, in a process of its own."""
