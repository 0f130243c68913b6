"""`python -m bench.virtual_shards` runs 100 schedulers and a million tenants in virtual time.

Real cores and the real code of members, around the store of the cluster's fault simulator. So one
process shows the behaviour of a fleet: how fairly tenants are served, how soon members catch up
after an outage of the store, and the load of the store.
"""
