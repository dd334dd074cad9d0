"""The description of the HTTP endpoints, made of the tables and types that they check with.

route_table   what a route is
openapi       all routes as an OpenAPI document
page          the same as a page for people, without any script
"""
