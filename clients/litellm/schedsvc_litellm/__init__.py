"""Holds each request of a LiteLLM proxy until its turn, and sends it to the granted engine.

`plugin` alone imports LiteLLM: name `schedsvc_litellm.plugin.admission` among its callbacks.
"""
