"""Why: one question, "how do I train this model fastest on these machines?", and everything that it depends on.

The answer is a plan, and why the others lost::

    inputs = PlannerInputs(profile, read_cluster_file(Path("cluster.toml")), batch=64)
    answer = find_plan(inputs)
    print(answer.chosen.step_ms, answer.chosen.candidate)
"""

from hybridpar.planner.evaluate import Outcome, Parts
from hybridpar.planner.inputs import PlannerInputs, check_made_for, inputs_of_plan
from hybridpar.planner.profile import ModelProfile
from hybridpar.planner.search import Answer, find_plan
from hybridpar.planner.space import Candidate

__all__ = [
    "Answer",
    "Candidate",
    "ModelProfile",
    "Outcome",
    "Parts",
    "PlannerInputs",
    "check_made_for",
    "find_plan",
    "inputs_of_plan",
]
