"""The federated methods, one file each; `registry` lists them."""
