"""What all federated searches share: a party's log, its trials, and how parties exchange."""
