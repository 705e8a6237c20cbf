r"""One agent and one server for every protocol.

terms         Terms, and what a search and an aggregation have to provide
agent         FederatedAgent: a site's side
server        FederatedServer: the hub's side
disclosure    Sees and Price: who reads which message, and what a run costs in privacy
registry      protocols by the names that study files use
"""
