"""The parts of `gpu_report.py`: each asks one thing, in a process of its own."""
