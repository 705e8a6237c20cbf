"""What the papers published, exactly: settings and parts that replications import."""
