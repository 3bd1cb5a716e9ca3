"""Why: one question, "how do I train this model fastest on these machines?", and everything that it depends on.

The answer is a plan, and why the others lost::

    from hybridpar.planner.inputs import PlannerInputs
    from hybridpar.planner.measure import profile_model
    from hybridpar.planner.search import find_plan

    inputs = PlannerInputs(profile_model(model, [images]), read_cluster_file(Path("cluster.toml")), batch=64)
    print(find_plan(inputs).chosen)

Nothing is imported here: `hybridpar --help` reads options from this package, and must not import torch.
"""
