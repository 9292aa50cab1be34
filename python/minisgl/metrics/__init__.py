"""What is measured: by the HTTP process (`server_metrics`, which brings prometheus_client), and by the step loop.

What people do with figures belongs elsewhere: benchmarks to `bench/`, boards to `deploy/`. Start with `meters.py`.
This file imports nothing: the engine process needs no more than its meters.
"""
