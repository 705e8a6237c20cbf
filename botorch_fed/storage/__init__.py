r"""What a party must not lose: `storage.store` keeps named bytes, `storage.log` events in order."""
