"""The Ray Serve application: an ingress in front of one deployment of replicas per model.

Invariants: Serve learns within seconds of a replica that dies, is replaced or drained; Serve's own limits never refuse
a request that a server's limits accept.
"""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from minisgl.ray.args import Args, ModelArgs
from minisgl.ray.ingress import Ingress
from minisgl.ray.replica import Replica

ANY_NUMBER = 1_000_000
"""Serve's limit of requests in a replica, never reached: the server's own limits answer 429 before."""
DRAIN_S = 600.0
"""Seconds for the streams of a replaced ingress (at every update) to end; no other can continue them."""
LOGS = {"enable_access_log": False}
"""Servers write a line for each request; Serve would write two more."""
PERIOD_S = 1.0
TIMEOUT_S = 6.0
_POLICY = "minisgl.ray.autoscaling:Policy"
_ROUTER = "minisgl.ray.router:PrefixRouter"


def build(args: Args) -> Application:
    """Build the application that `serve.run` and `serve deploy` take."""
    models = args.by_name()
    handles = {name: _replicas(name, one) for name, one in models.items()}
    ingress = serve.deployment(Ingress).options(
        name="minisgl",
        num_replicas=args.ingress_replicas,
        max_ongoing_requests=ANY_NUMBER,
        logging_config=LOGS,
        ray_actor_options={"num_cpus": 0, "resources": args.ingress_resources},
        graceful_shutdown_timeout_s=max(DRAIN_S, *(one.drain_s for one in models.values())),
    )
    return ingress.bind(handles, args.retry_s)


def app(args: Args) -> Application:
    """Builder for `serve run minisgl.ray:app` and the import path of YAML files. Serve reads the type of `args` to
    check its values, so annotations in this file must not be strings."""
    return build(args)


def _replicas(name: str, args: ModelArgs) -> Application:
    options: dict[str, Any] = {
        "name": _deployment_name(name),
        "max_ongoing_requests": ANY_NUMBER,
        "logging_config": LOGS,
        "health_check_period_s": PERIOD_S,
        "health_check_timeout_s": TIMEOUT_S,
        "graceful_shutdown_timeout_s": args.drain_s,
        "graceful_shutdown_wait_loop_s": PERIOD_S,
        "ray_actor_options": {"num_cpus": args.cpus, "num_gpus": args.gpus},  # Ray places an actor on one node
    }
    if args.max_replicas is None:
        options["num_replicas"] = args.replicas
    else:
        options["autoscaling_config"] = _scaling(args, args.max_replicas)
    if args.routing == "prefix":
        options["request_router_config"] = RequestRouterConfig(
            request_router_class=_ROUTER,
            request_routing_stats_period_s=PERIOD_S,
            request_routing_stats_timeout_s=TIMEOUT_S,
        )
    return serve.deployment(Replica).options(**options).bind(name, args.model_dump(mode="json"))


def _scaling(args: ModelArgs, most: int) -> AutoscalingConfig:
    policy = {"queued_tokens": args.queued_tokens, "kv_use": args.kv_use}
    return AutoscalingConfig(
        min_replicas=args.min_replicas,
        initial_replicas=args.replicas,
        max_replicas=most,
        metrics_interval_s=PERIOD_S,
        look_back_period_s=2 * PERIOD_S,
        upscale_delay_s=args.upscale_delay_s,
        downscale_delay_s=args.downscale_delay_s,
        policy=AutoscalingPolicy(policy_function=_POLICY, policy_kwargs=policy),
    )


def _deployment_name(model: str) -> str:
    """Return the model's name with only characters that Serve allows in names and tags."""
    return "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in model)
