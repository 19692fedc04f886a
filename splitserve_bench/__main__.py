"""`python -m splitserve_bench`: as `splitserve bench`, also of a checkout that is not installed."""

from splitserve_bench.commands import bench

if __name__ == "__main__":
    bench(prog_name="splitserve bench")
