"""What Millstream costs, as ratios to references of the same run: `python -m bench`, docs/benchmarks.md."""
