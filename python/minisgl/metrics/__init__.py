"""The measurements of the HTTP process (`server_metrics`, which needs prometheus_client) and of the step loop.

Users of the figures are elsewhere: benchmarks in `bench/`, dashboards in `deploy/`. Start with `meters.py`. This file
imports nothing, because the engine process needs only its meters.
"""
