"""The Kubeflow pipeline of a run: its graph, the bodies of its steps, and the training job."""

SEGMENTS = 4
"""Number of segments into which the pipeline divides the training by default."""

IMPORTABLE = ("model", "train_data", "test_data")
"""Parameters that hold the address of an artifact, if the pipeline is compiled for it."""

RELEASE_NAMES = {
    "connection": "bapo-connection",
    "token_secret": "bapo-token",
    "s3_secret": "bapo-s3",
    "hub_secret": "bapo-hub",
    "ca_bundle": "bapo-ca",
}
"""ConfigMaps and Secrets that the steps get, with the names of a release `bapo`: the release's
addresses, the services' token, the object store's keys, the hub's token (yours, with the key
`HF_TOKEN`) and the certificates of authorities. The last two need not exist."""
