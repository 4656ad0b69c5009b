"""A fleet on a virtual clock, under the policies that the service calls: what if interruptions were ten times as frequent?"""
