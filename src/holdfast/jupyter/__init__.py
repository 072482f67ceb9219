"""The Jupyter kernel: notebooks whose cells run in a sandbox, each as a transaction. Needs the extra `jupyter`."""
