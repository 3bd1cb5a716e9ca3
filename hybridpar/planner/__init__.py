"""Predicts the step time of every way to train a model on a cluster, and searches for the fastest.

The answer is a plan, with the reasons why the others are slower::

    from hybridpar.planner.inputs import PlannerInputs
    from hybridpar.planner.profile import profile_model
    from hybridpar.planner.search import find_plan

    inputs = PlannerInputs(profile_model(model, [images]), read_cluster_file(Path("cluster.toml")), batch=64)
    print(find_plan(inputs).chosen)

Nothing is imported here: `hybridpar --help` reads options from this package, and must not import torch.
"""
