"""`bough bench`: the benchmarks. They compare figures within one run, because machines differ."""
