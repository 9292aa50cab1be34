"""Break the scheduler on purpose: the fuzzer notices each way within a few hundred scenarios."""

from __future__ import annotations

import pytest

from minisgl.scheduler.reference import ReferenceControlPlane
from tests.helpers.property import draw_from, make_scenario, run
from tests.property.mutations import MUTATIONS, STATE_MUTATIONS

MAX_SCENARIOS = 600


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_scheduler_mutation_is_detected(mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    notice(states=False)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", STATE_MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_scheduler_mutation_is_detected_with_states(mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    notice(states=True)


def notice(*, states: bool) -> None:
    for seed in range(MAX_SCENARIOS):
        try:
            run(make_scenario(draw_from(seed), states), ReferenceControlPlane)
        except (AttributeError, NameError, TypeError):
            raise  # the mutation itself is broken: it names what is no longer there
        except Exception:
            return  # an assertion of the driver, or a check of the scheduler itself
    pytest.fail(f"{MAX_SCENARIOS} scenarios did not notice")
