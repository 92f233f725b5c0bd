"""The Kubeflow pipeline of a run: its graph, the bodies of its steps, and the training job."""

SEGMENTS = 4
"""Number of segments into which the pipeline divides the training by default."""

IMPORTABLE = ("model", "train_data", "test_data")
"""Parameters that hold the address of an artifact, if the pipeline is compiled for it."""
