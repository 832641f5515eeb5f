-- include window
-- include caller
-- authenticate: who is calling, in one round trip and before any body is read. Arguments and answer: caller.lua.
return authenticate()
