"""`python -m splitserve_bench`: as `splitserve bench`, also of a checkout that is not installed."""

from serving_core.process.extras import end_without_base

if __name__ == "__main__":
    end_without_base()
    from splitserve_bench.commands import bench

    bench(prog_name="splitserve bench")
