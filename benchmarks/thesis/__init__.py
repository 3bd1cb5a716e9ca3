"""A thesis claims 1.47, 1.39 and 2.44 times the speed for its hybrid of pipelines and replicas; this measures the same.

`python -m benchmarks.thesis` trains ResNet-18, 34 and 50 on CIFAR-10, CIFAR-100 and Caltech-101, with everything that
the published baseline could have been. `cells` says what is measured, and what has been already; `peers` are the
baselines and `ours` is hybridpar; `rounds` times epochs of all of them in turn; `worker` is what each process does;
`report` shows the table.
"""
