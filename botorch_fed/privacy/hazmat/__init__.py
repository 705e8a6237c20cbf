r"""Raw parts. Using them directly is easy to get wrong: prefer `botorch_fed.privacy.mechanisms`.

::

    ckks     the lattice arithmetic under the encrypted channels
    noise    where privacy noise and secret coins come from
"""
