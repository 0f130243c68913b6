"""`python -m bench.virtual_shards` runs 100 schedulers and a million tenants in virtual time.

Real cores and the real code of members, around the store of the cluster's fault simulator. So one
process shows what a fleet would do: how fair tenants are served, how soon members catch up after
the store was away, and what they ask of the store.
"""
