"""A CUDA device that is simulated on the CPU, for a torch without CUDA: enough of it that all of tests/gpu runs.

What it shows is that the code for CUDA can run: no tensor is used beside one of another device, nothing is awaited
where nothing may be, what is captured as a graph can be captured, and replayed it computes the same from the same
addresses. What it cannot show is what kernels of a device give, how long they take, and what happens at the same time:
each operation is done at once, by the CPU.
"""
