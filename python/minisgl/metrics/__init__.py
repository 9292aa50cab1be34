"""What is measured: by the HTTP process (`server_metrics`, which brings prometheus_client), and by the step loop.

Imports nothing: the engine process needs no more than its meters.
"""
