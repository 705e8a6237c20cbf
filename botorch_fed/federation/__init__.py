r"""What all federated searches share, written once.

hub           the events of a hub's log, and what follows from them
trial         what a site is asked to evaluate, and what came of it
terms         what all parties agree upon, and what a search and an aggregation are
agent         a site's side of every protocol
server        the hub's side of every protocol
disclosure    Sees and Price: who reads which message, and what a run costs in privacy
registry      protocols by the names that study files use
"""
