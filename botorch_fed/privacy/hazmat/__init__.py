r"""Raw parts. Using them directly is easy to get wrong: prefer `botorch_fed.privacy.mechanisms`.

noise    where privacy noise and secret coins come from
"""
